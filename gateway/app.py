"""The public application, put together from its parts.

Must never open a database or a socket: whoever calls `build_app` hands everything in.
"""

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute, iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.routing import compile_path
from starlette.types import Scope

from gateway.docs import add_documents, describe
from gateway.front import Front
from gateway.http_errors import on_http_exception, on_mesh_error, on_validation_error
from gateway.routes import context, health, intents, keys, mesh, threads
from gateway.settings import GatewaySettings
from gateway.state import Gateway
from ledger.ledger import Ledger
from mesh.backplane.backplane import Backplane
from mesh.backplane.notice_board import NoticeBoard
from mesh.contract.errors import MeshError

ROUTERS: tuple[APIRouter, ...] = (
    intents.router,
    threads.router,
    threads.import_router,
    context.router,
    mesh.router,
    keys.router,
    health.router,
    health.metrics_router,
)


def _add_method_table(app: FastAPI) -> None:
    """Let the 405 answer name every method of a path: the framework names those of its first route only."""
    table = [
        (compile_path(route.path)[0], set(route.methods or ()))
        for route in iter_route_contexts(app.routes)
        if isinstance(route.original_route, APIRoute) and route.path is not None
    ]

    def methods_of(scope: Scope) -> set[str]:
        return {method for pattern, methods in table if pattern.match(scope["path"]) for method in methods}

    app.state.methods_of = methods_of


def build_app(settings: GatewaySettings, ledger: Ledger, backplane: Backplane | None, board: NoticeBoard) -> FastAPI:
    """Return the application; `app.state.gateway` is its `Gateway`."""
    app = FastAPI(
        title="Intent mesh",
        version="0.1.0",
        description="Submit intents; nodes bid for them and run each in a process of its own.",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.gateway = Gateway(settings, ledger, backplane, board)
    app.add_middleware(Front)
    app.add_exception_handler(MeshError, on_mesh_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    for router in ROUTERS:
        app.include_router(router)
    describe(app)
    add_documents(app)
    _add_method_table(app)
    return app
