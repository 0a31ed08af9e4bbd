# Two images: the operator (no torch, ray or verl) and the worker. Dependencies have a layer of their own,
# which is built again only when a requirement or pin of that image changes; ours comes after it.
#
#   docker build --target worker -t foremoe-worker .            (or buildah bud, podman build)
#   docker build --target operator -t foremoe-operator .
#
# Any image with Python 3.11 or newer and Debian's apt can be the base. Nothing is compiled in the final
# images; pip is only lent to them, as one file.
ARG BASE_IMAGE=python:3.11-slim

# --- what both images have: an empty environment, a user without rights
FROM ${BASE_IMAGE} AS base
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
RUN python3 -m venv --without-pip /opt/venv \
 && echo 'foremoe:x:1000:1000:ForeMoE:/home/foremoe:/bin/sh' >> /etc/passwd \
 && echo 'foremoe:x:1000:' >> /etc/group \
 && mkdir -p /home/foremoe && chown 1000:1000 /home/foremoe

# --- what to install, without the parts of pyproject.toml and constraints.txt that do not matter here
FROM base AS requirements
WORKDIR /src
COPY pyproject.toml constraints.txt cluster/foremoe_cluster/files/requirements.py ./
RUN python3 requirements.py operator /out/operator && python3 requirements.py worker /out/worker

# --- pip and a compiler, never shipped
FROM base AS tools
RUN python3 -m venv /opt/tools 2>/dev/null \
 || (apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv >/dev/null && python3 -m venv --clear /opt/tools)
RUN include=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))') \
 && apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends gcc libc6-dev $(test -e "$include/Python.h" || echo python3-dev) >/dev/null
RUN /opt/tools/bin/pip install -q --no-cache-dir 'pip>=25' 'setuptools>=77' wheel
# Lent to the final images: pip (a wheel runs as it is) and dependencies that are published as source only.
# Copied, not mounted: buildah 1.28 mounts a cached stage in an older state.
COPY --from=requirements /out/worker/constraints.txt /opt/tools/
RUN /opt/tools/bin/pip download -q --no-deps -d /lent pip && mv /lent/pip-*.whl /lent/pip.whl \
 && SOURCE_DATE_EPOCH=315532800 \
    /opt/tools/bin/pip wheel -q --no-deps --no-build-isolation -c /opt/tools/constraints.txt -w /lent pycosat

# --- our own code, compiled, without its dependencies
FROM tools AS code
WORKDIR /src
COPY LICENSE README.md pyproject.toml ./
COPY worker worker
COPY operator operator
RUN /opt/tools/bin/pip wheel -q --no-deps --no-index --no-build-isolation -w /dist . \
 && /opt/tools/bin/pip --python /opt/venv/bin/python install -q --no-deps --no-index --no-compile --prefix /code /dist/*.whl \
 && python3 -m compileall -q --invalidation-mode unchecked-hash /code

FROM base AS operator
COPY --from=tools /lent /opt/lent
COPY --from=requirements /out/operator /opt/requirements
ARG LOCAL_WHEELS=
RUN echo "local wheels: ${LOCAL_WHEELS:-none}" \
 && python /opt/lent/pip.whl/pip install -q --no-cache-dir --find-links /opt/lent \
      -c /opt/requirements/constraints.txt -r /opt/requirements/requirements.txt \
 # The client's asyncio twin doubles its size, and the operator does not use it.
 && rm -rf /opt/venv/lib/python3*/site-packages/kubernetes/aio
COPY --from=code /code /opt/venv
USER 1000:1000
WORKDIR /home/foremoe
ENTRYPOINT ["python", "-m", "foremoe_operator"]

FROM base AS worker
COPY --from=tools /lent /opt/lent
COPY --from=requirements /out/worker /opt/requirements
ARG LOCAL_WHEELS=
RUN echo "local wheels: ${LOCAL_WHEELS:-none}" \
 && python /opt/lent/pip.whl/pip install -q --no-cache-dir --find-links /opt/lent \
      -c /opt/requirements/constraints.txt -r /opt/requirements/requirements.txt
COPY --from=code /code /opt/venv
# The planner's kernels, compiled once here and not by every rank of every job.
RUN NUMBA_CACHE_DIR=/opt/venv/share/foremoe/numba python -c 'from foremoe.planner import warm_up; warm_up()' \
 && chmod -R a+rX /opt/venv/share/foremoe
USER 1000:1000
WORKDIR /home/foremoe
ENTRYPOINT ["python", "-m", "foremoe.agent"]
