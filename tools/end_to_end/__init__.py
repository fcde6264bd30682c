"""Steps of whole models, timed with our attention and with PyTorch's in turns: `python -m tools.end_to_end`."""
