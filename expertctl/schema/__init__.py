"""Documents that cross a boundary: strict JSON, the JSON Schemas, the manifest."""
