"""The process that holds the embedding model, and the client that talks to it."""
