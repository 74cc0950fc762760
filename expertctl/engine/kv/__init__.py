"""Keys and values of attention: blocks, pools and the prefix cache."""
