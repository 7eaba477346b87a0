"""The only Redis code: the book of bids and pending intents, and notices that wake others."""
