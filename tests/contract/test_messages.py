"""The golden JSON of every message: what older and newer processes send each other stays readable."""

import json
from pathlib import Path
from typing import Any

import pytest

from mesh.contract import messages
from mesh.contract.messages import Message

GOLDEN = Path(__file__).with_name("golden_messages.json")


def message_classes() -> dict[str, type[Message]]:
    """Kind → class of every message."""
    return {
        cls.model_fields["kind"].default: cls
        for cls in vars(messages).values()
        if isinstance(cls, type) and issubclass(cls, Message) and "kind" in cls.model_fields
    }


CLASSES = message_classes()
SAMPLES: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text())


def test_every_message_has_a_golden_sample() -> None:
    """A new message is added here; one that is gone is not forgotten silently."""
    assert set(SAMPLES) == set(CLASSES)


@pytest.mark.parametrize("kind", sorted(SAMPLES))
def test_the_golden_sample_reads_and_writes_the_same(kind: str) -> None:
    """What stands on the wire today is understood, field by field."""
    message = CLASSES[kind].model_validate_json(json.dumps(SAMPLES[kind]))
    assert json.loads(message.model_dump_json()) == SAMPLES[kind]


@pytest.mark.parametrize("kind", sorted(SAMPLES))
def test_the_sample_has_every_field(kind: str) -> None:
    """A field that is added shows up here, and with it the question whether it has a default."""
    assert set(SAMPLES[kind]) == set(CLASSES[kind].model_fields)


@pytest.mark.parametrize("kind", sorted(SAMPLES))
def test_a_newer_sender_is_understood(kind: str) -> None:
    """A field that this version does not know is passed over."""
    sample = SAMPLES[kind] | {"a_field_of_the_future": {"x": 1}}
    message = CLASSES[kind].model_validate_json(json.dumps(sample))
    assert json.loads(message.model_dump_json()) == SAMPLES[kind]


@pytest.mark.parametrize("kind", sorted(SAMPLES))
def test_an_older_sender_is_understood(kind: str) -> None:
    """Only the fields without a default must be there."""
    model = CLASSES[kind]
    required = {name: SAMPLES[kind][name] for name, field in model.model_fields.items() if field.is_required()}
    model.model_validate_json(json.dumps(required))
