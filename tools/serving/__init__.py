"""What serving engines ask of attention: batches of prompts and single tokens over pages."""
