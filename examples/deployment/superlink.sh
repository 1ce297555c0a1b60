#!/usr/bin/env bash
# The SuperLink of a federation: superlink.sh SERVER_FOLDER [HOST] [PORT]
#
# SERVER_FOLDER comes from make-certificates.sh. TLS and node authentication are on, every outbound connection of
# Flower is off. What it must remember (registered sites) is in SERVER_FOLDER/superlink.db.
set -euo pipefail

folder=$(cd "${1:?superlink.sh SERVER_FOLDER [HOST] [PORT]}" && pwd) host=${2:-127.0.0.1} port=${3:-8000}
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
export FLWR_HOME="$folder/flwr"
mkdir -p "$FLWR_HOME"
exec flower-superlink --host "$host" --port "$port" --isolation process \
    --ssl-ca-certfile "$folder/ca.crt" --ssl-certfile "$folder/server.crt" --ssl-keyfile "$folder/server.key" \
    --enable-supernode-auth --superexec-auth-secret-file "$folder/federate.secret" \
    --disable-runtime-dependency-installation --database "$folder/superlink.db"
