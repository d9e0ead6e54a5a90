# The demo in a container:
#
#     docker build -t nvme-offload .
#     docker run --rm --security-opt seccomp=unconfined -v /mnt/nvme0:/drive nvme-offload
#
# Docker's default seccomp profile forbids io_uring; without the option above plain threads do the I/O. What /drive is
# decides what is measured: mount a folder of the drive, not of the container's overlay.
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ liburing-dev && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-deps -w /wheels /source

FROM python:3.12-slim
COPY --from=build /wheels /wheels
RUN wheel=$(echo /wheels/*.whl) && pip install --no-cache-dir "$wheel" && rm -r /wheels
COPY perf/experiments /usr/local/lib/python3.12/site-packages/nvme_offload/perf/experiments
VOLUME /drive
ENTRYPOINT ["python", "-m", "nvme_offload.perf.experiments", "demo", "--path", "/drive", "--out", "/drive/demo-out"]
