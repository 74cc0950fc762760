"""Where blobs lie."""
