"""What both HTTP servers, the registry and the one that generates, have in common."""
