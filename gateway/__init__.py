"""The public HTTP face of the mesh."""
