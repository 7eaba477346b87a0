"""What every room agrees on: frozen messages, states, errors, ids, JSON, templates. No I/O."""
