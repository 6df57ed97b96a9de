"""As little as a management command needs."""

import os

from psycopg.conninfo import conninfo_to_dict

_database = conninfo_to_dict(os.environ["DATABASE_URL"])
SECRET_KEY = os.environ.get("SECRET_KEY", "unused")
INSTALLED_APPS = ["shop"]
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        **{
            name: _database[key]
            for name, key in (
                ("NAME", "dbname"),
                ("USER", "user"),
                ("PASSWORD", "password"),
                ("HOST", "host"),
                ("PORT", "port"),
            )
            if key in _database
        },
    }
}
