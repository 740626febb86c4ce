# The service with its default model. To build and run it, on CPU:
#
#   docker build -t inkstream .
#   docker run --rm --read-only --tmpfs /tmp -p 127.0.0.1:8000:8000 -e INKSTREAM_INSECURE_NO_AUTH=true inkstream
#
# Without keys the server listens on loopback only, but inside a container it must listen on all addresses. So the image does
# not start unless INKSTREAM_INSECURE_NO_AUTH=true allows that (publish the port on 127.0.0.1 only) or INKSTREAM_KEYS_FILE
# names a file of keys. Every other setting is an environment variable INKSTREAM_... too. See docs/deploy.md;
# tests/container/run builds this file without Docker, and tests the image.
#
# BASE         any Debian-like image with Python 3.11 to 3.13 and its venv module; for a GPU, one with gcc and Python's
#              headers, since Triton compiles when the service first starts (compose.gpu.yaml names one). The digest
#              pins the image; docker buildx imagetools inspect python:3.12-slim prints the newest digest
# SLIM         empty keeps all files of BASE and of the packages; a GPU needs them
# TORCH        the torch version, instead of the one in constraints.txt. Empty: no torch, only the native kernels
#              (docs/deploy.md)
# TORCH_INDEX  an additional index for pip. The default has the CPU builds. PyPI's builds are for CUDA and include its
#              libraries; to use them: --build-arg TORCH_INDEX=
# VERSION      what --version, metrics and receipts of the image show: "$(python3 -m inkstream.build_version)", since git does not
#              enter the build. Without it, a version from a hash of the files
# REVISION     the commit, for a label: "$(git rev-parse HEAD)"
#
# Separate layers for the base, the packages, the weights and the code, so that a code change ships only the code.
ARG BASE=python:3.12.14-slim-trixie@sha256:2f17fc044b579bab302c2e8054d3a686e2cb9a83de48e70534b94cd8ebbe06a9

# Builds the native kernels; the compiler stays in this stage. For all x86-64 levels, because images run on other machines.
FROM ${BASE} AS kernels
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY app/__init__.py app/__main__.py app/
COPY app/common/__init__.py app/common/cache_directory.py app/common/start_signals.py app/common/version.py app/common/
COPY app/cli/__init__.py app/cli/compile.py app/cli/
COPY app/engine/__init__.py app/engine/
COPY app/engine/cpu app/engine/cpu
RUN python3 -m app compile --all-levels --cache-dir /kernels

FROM ${BASE} AS builder
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
RUN python3 -m venv /opt/inkstream
# Packages are installed by hash except torch, whose build is an option; by then all dependencies of both are installed.
COPY constraints.txt requirements.lock ./
RUN { grep -v "^torch==" constraints.txt; echo "${TORCH}"; } > pins.txt \
    && /opt/inkstream/bin/pip install --require-hashes --no-deps --requirement requirements.lock \
    && { [ -z "${TORCH}" ] \
        || /opt/inkstream/bin/pip install ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} --constraint pins.txt "${TORCH}"; } \
    && /opt/inkstream/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > site \
    && echo /srv/inkstream/code > "$(cat site)/inkstream.pth"

# The runtime packages. strip, from the package binutils, stays in this stage.
FROM builder AS packages
ARG SLIM=1
COPY deploy/image/strip-packages /build/
RUN [ -z "${SLIM}" ] || { apt-get update && apt-get install --yes --no-install-recommends binutils \
    && find /opt/inkstream -name __pycache__ -prune -exec rm -rf {} + && ./strip-packages "$(cat site)"; }

# Readable by the user below, whatever umask the weights were created with.
FROM builder AS code
COPY pyproject.toml setup.py README.md LICENSE ./
COPY app app
COPY benchmarks benchmarks
COPY inkstream inkstream
COPY model model
COPY weights weights
ARG VERSION
RUN chmod -R a+rX weights \
    && INKSTREAM_BUILD_VERSION="${VERSION}" /opt/inkstream/bin/pip install --no-deps --no-build-isolation --target /code . \
    && { [ ! -d "$(cat site)/torch" ] || /opt/inkstream/bin/pip check; } \
    && mv /code/inkstream/weights /weights
COPY --from=kernels /kernels /kernels
RUN mkdir /code/inkstream/app/engine/cpu/built && cp /kernels/inkstream-* /code/inkstream/app/engine/cpu/built

# A named user, because libraries look the name up. Slim images lack the standard library's bytecode, and a read-only
# container could not write it: compile it here instead of at every start.
FROM ${BASE} AS base
ARG SLIM=1
COPY deploy/image/strip-base /build/
RUN { [ -z "${SLIM}" ] || /build/strip-base; } && rm -r /build \
    && groupadd --gid 10001 inkstream \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin inkstream \
    && install -d -o 10001 -g 10001 /var/cache/inkstream \
    && python3 -m compileall -q -x "lib2to3|/tests?/" "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"

# SBOM: all packages in the image. As a file: docker build --target sbom --output dist .
FROM packages AS list
COPY deploy/image/sbom.py ./
COPY --from=base /var/lib/dpkg/status base-status
COPY --from=code /code /code
RUN python3 sbom.py base-status "$(cat site)" /code > sbom.cdx.json
FROM scratch AS sbom
COPY --from=list /build/sbom.cdx.json /

# The stripped base as one layer. Its variables are not inherited: python:3.12 has Python in /usr/local.
FROM scratch
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="inkstream" \
      org.opencontainers.image.description="A streaming text-completion service for decoder-only transformers" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=base / /
COPY --from=packages /opt/inkstream /opt/inkstream
COPY --from=code /weights /srv/inkstream/weights
COPY --from=code /code /srv/inkstream/code
COPY --from=sbom /sbom.cdx.json /srv/inkstream/sbom.cdx.json
ENV PATH=/srv/inkstream/code/bin:/opt/inkstream/bin:/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin \
    LANG=C.UTF-8 \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    INKSTREAM_WEIGHTS=/srv/inkstream/weights
WORKDIR /srv/inkstream
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
# Slim images have no curl. The empty ProxyHandler keeps a proxy in the environment away from loopback.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:' + os.environ.get('INKSTREAM_PORT', '8000') + '/health/ready', timeout=4)"]
ENTRYPOINT ["inkstream"]
CMD ["serve", "--host", "0.0.0.0"]
