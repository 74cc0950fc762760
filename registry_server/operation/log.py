"""What the registry logs, and where to."""

import logging

from expertctl.http.log import log_config

REQUESTS = logging.getLogger("registry_server.requests")
LOGGING = log_config("registry_server")
