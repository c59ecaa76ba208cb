"""Keys and values of the embedded engine: where they are kept, and the attention over them."""
