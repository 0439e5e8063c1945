"""The demo: two small models learn handwritten digits, with torch.nn and with this package."""
