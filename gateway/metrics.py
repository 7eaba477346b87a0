"""What the gateway counts. Labels are few and bounded.

Must never carry a tenant, an id or anything that a caller wrote.
"""

from prometheus_client import Counter, Gauge, Histogram

REQUESTS = Counter("intentmesh_http_requests_total", "Requests answered", ["method", "route", "status"])
REQUEST_SECONDS = Histogram(
    "intentmesh_http_request_seconds",
    "Time from a request's headers to its answer's first byte",
    ["method", "route"],
    buckets=(0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
REQUESTS_OPEN = Gauge("intentmesh_http_requests_open", "Requests that are being answered now, streams included")
STREAMS_OPEN = Gauge("intentmesh_event_streams_open", "Event streams that are open now")
INTENTS_SUBMITTED = Counter("intentmesh_intents_submitted_total", "Intents made durable by this gateway", ["is_replay"])
ERRORS = Counter("intentmesh_internal_errors_total", "Requests that met a bug (HTTP 500)")
