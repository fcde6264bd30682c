"""Attention under the names that Hugging Face's transformers and diffusers know."""
