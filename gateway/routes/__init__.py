"""The routes of the public HTTP face, one file for each noun."""
