# syntax=docker/dockerfile:1
# One image for every role: intentmesh up | gateway | ledger | node. Built by: docker compose build
# Must never hold a compiler or a CUDA build of torch when it runs.

FROM python:3.11-slim-bookworm AS build
ENV UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 UV_CACHE_DIR=/var/cache/uv
RUN pip install --no-cache-dir uv==0.13.9 && python -m venv --without-pip /venv
WORKDIR /build
COPY requirements.lock ./
RUN --mount=type=cache,target=/var/cache/uv \
    uv pip install --python /venv/bin/python --torch-backend cpu -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY capabilities capabilities
COPY cli cli
COPY gateway gateway
COPY ledger ledger
COPY mesh mesh
COPY worker worker
RUN --mount=type=cache,target=/var/cache/uv uv pip install --python /venv/bin/python --no-deps .

FROM python:3.11-slim-bookworm
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 INTENTMESH_DATA_DIR=/data INTENTMESH_LOG_JSON=true
# Beyond loopback a mesh needs keys: docker exec CONTAINER intentmesh keys add local
ENV INTENTMESH_ACCESS=locked
RUN useradd --system --uid 10001 --home-dir /data --shell /usr/sbin/nologin intentmesh \
    && install -d -o intentmesh -g intentmesh -m 0700 /data
COPY --from=build /venv /venv
# Capabilities of your own: mount their folder at /app/capabilities.
WORKDIR /app
USER 10001
VOLUME /data
EXPOSE 8080 8081
ENTRYPOINT ["intentmesh"]
CMD ["up", "--host", "0.0.0.0"]
