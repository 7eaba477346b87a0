"""The broker: models that a node calls on behalf of its workers."""
