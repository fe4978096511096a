"""An app watched by Sentry and by OpenTelemetry, as their guides say."""

from __future__ import annotations

import os
from typing import Any

import sentry_sdk
from celery import Celery, Task, signals
from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from sentry_sdk.integrations.celery import CeleryIntegration
from sentry_sdk.transport import Transport

from capsule_tasks import Capsule

_URL = os.environ.get("REDIS_URL", "redis://localhost")


class OwnTask(Task):  # type: ignore[misc]
    """The application's own, for all its tasks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mark(f"called:{self.name}", self.request.id)
        return super().__call__(*args, **kwargs)

    def after_return(
        self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any
    ) -> None:
        mark(f"returned:{self.name}", status)


app = Celery("observed", broker=_URL, backend=_URL, task_cls=OwnTask)
app.conf.update(
    task_default_queue=os.environ.get("TEST_QUEUE", "celery"),
    broker_connection_retry_on_startup=True,
    worker_pool=os.environ.get("TEST_POOL", "capsule_tasks.taskpool:TaskPool"),
)
Capsule(app)


def mark(name: str, value: str) -> None:
    app.backend.client.rpush(f"mark:{name}", value)


class Telling(Transport):
    def capture_envelope(self, envelope: Any) -> None:
        event = envelope.get_event()
        if event is not None:
            mark("sentry", event["exception"]["values"][-1]["value"])


class Exporter(SpanExporter):
    def export(self, spans: Any) -> SpanExportResult:
        for span in spans:
            mark(f"span:{span.name}", f"{span.context.trace_id:032x}")
        return SpanExportResult.SUCCESS


sentry_sdk.init(dsn="http://key@localhost/1", transport=Telling, integrations=[CeleryIntegration()])


@signals.worker_process_init.connect(weak=False)
def instrument(**_: Any) -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(Exporter()))
    trace.set_tracer_provider(provider)
    CeleryInstrumentor().instrument()


@signals.worker_ready.connect
def tell_ready(**_: Any) -> None:
    if descriptor := os.environ.get("TEST_READY_FD"):
        os.write(int(descriptor), b"ready\n")


@app.task(name="fail")
def fail(text: str) -> None:
    raise ValueError(text)


@app.task(name="afail")
async def afail(text: str) -> None:
    raise ValueError(text)


@app.task(name="fine")
def fine() -> int:
    return 1
