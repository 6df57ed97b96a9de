"""Creates the Secret of the trial PostgreSQL with a random password, once; one that exists is left alone.

It needs the right to create Secrets and no other: whether the Secret exists is learnt from the API server's 409.
"""

import json
import os
import secrets
import ssl
import sys
import urllib.error
import urllib.request

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


def read(name: str) -> str:
    with open(f"{ACCOUNT}/{name}") as file:
        return file.read()


def main() -> None:
    secret = json.loads(os.environ["SECRET"])
    secret["stringData"]["password"] = secrets.token_urlsafe(32)
    host = os.environ["KUBERNETES_SERVICE_HOST"]
    host = f"[{host}]" if ":" in host else host
    namespace, name = secret["metadata"]["namespace"], secret["metadata"]["name"]
    request = urllib.request.Request(
        f"https://{host}:{os.environ['KUBERNETES_SERVICE_PORT']}/api/v1/namespaces/{namespace}/secrets",
        data=json.dumps(secret).encode(),
        headers={"Authorization": f"Bearer {read('token')}", "Content-Type": "application/json"},
        method="POST",
    )
    context = ssl.create_default_context(cafile=f"{ACCOUNT}/ca.crt")
    try:
        with urllib.request.urlopen(request, timeout=20, context=context):
            print(f"Secret {name} created")
    except urllib.error.HTTPError as error:
        if error.code != 409:
            sys.exit(f"Secret {name} could not be created: {error.code} {error.read(1000).decode(errors='replace')}")
        print(f"Secret {name} exists and is left as it is")
    except OSError as error:
        sys.exit(f"The API server could not be reached: {error}")


main()
