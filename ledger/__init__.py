"""The durable truth: intents, threads, turns, events, and the context of each thread."""
