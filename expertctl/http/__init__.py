"""What both HTTP servers, the registry and the generation server, share."""
