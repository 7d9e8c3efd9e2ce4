"""Pictures and sound as Inkling's towers read them. `content.py` takes them out of chat messages; no JAX here."""
