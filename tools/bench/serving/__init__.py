"""Programs that time what servers compute: decoding, pages, chunks of prompts, batches of both."""
