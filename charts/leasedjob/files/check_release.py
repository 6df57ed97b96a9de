"""What `helm test` looks at besides the database.

The custom resources are served, the operator's account may read them,
and (where METRICS names the Service) a ready operator answers.
"""

import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from typing import Any

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
GROUP = "/apis/leasedjob.io/v1alpha1"
WANTED = {"leasedjobs", "leasedjobs/status", "leasedjobruns", "leasedjobruns/status"}


def get(path: str) -> Any:
    host = os.environ["KUBERNETES_SERVICE_HOST"]
    host = f"[{host}]" if ":" in host else host
    with open(f"{ACCOUNT}/token") as file:
        token = file.read()
    request = urllib.request.Request(
        f"https://{host}:{os.environ['KUBERNETES_SERVICE_PORT']}{path}", headers={"Authorization": f"Bearer {token}"}
    )
    context = ssl.create_default_context(cafile=f"{ACCOUNT}/ca.crt")
    with urllib.request.urlopen(request, timeout=20, context=context) as answer:
        return json.load(answer)


def main() -> None:
    missing = WANTED - {r["name"] for r in get(GROUP)["resources"]}
    if missing:
        sys.exit(f"not served: {', '.join(sorted(missing))}; are the custom resources older than this release?")
    print("custom resources are served")
    for namespace in json.loads(os.environ["NAMESPACES"]) or [""]:
        where = f"/namespaces/{namespace}" if namespace else ""
        for kind in ("leasedjobs", "leasedjobruns"):
            get(f"{GROUP}{where}/{kind}?limit=1")
        print(f"the operator's account may read them in {namespace or 'all namespaces'}")
    if metrics := os.environ.get("METRICS"):
        with urllib.request.urlopen(metrics, timeout=20) as answer:
            answer.read()
        print("a ready operator answers")


try:
    main()
except urllib.error.HTTPError as error:
    sys.exit(f"{error.url}: {error.code} {error.read(1000).decode(errors='replace')}")
except OSError as error:
    sys.exit(f"no answer: {error}")
