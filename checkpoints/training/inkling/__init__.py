"""How the embedded tiny Inkling was made: text as for the tiny Flint, and pictures, tones and drafting besides."""
