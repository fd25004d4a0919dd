"""What skrl may print. Imported before the library, which speaks from its first line on."""

import logging

logging.getLogger("skrl").addFilter(lambda record: record.levelno >= logging.ERROR)
