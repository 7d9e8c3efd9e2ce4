"""Inkling, Thinking Machines Lab's mixture-of-experts model: text, pictures and audio in, text out."""

from modeling.inkling.config import InklingConfig as InklingConfig
