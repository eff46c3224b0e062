# The command line without a framework:
#   docker build -t dpro-search .
#   docker run --rm -v "$PWD:/work" dpro-search diagnose rank0.json.gz
FROM python:3.11-slim

COPY LICENSE NOTICE README.md pyproject.toml /src/
COPY dpro_search /src/dpro_search
RUN pip install --no-cache-dir /src && rm -r /src && useradd --create-home planner

USER planner
WORKDIR /work
ENTRYPOINT ["dpro-search"]
CMD ["--help"]
