"""Entry points other than scaled_dot_product_attention, and integrations with other libraries."""
