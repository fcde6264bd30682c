"""What is published besides the wheel: a kernel for the Hub of Hugging Face."""
