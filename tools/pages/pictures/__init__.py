"""Pictures of the documents, and the notebook."""
