#!/usr/bin/env bash
# The one port that sites reach: proxy.sh SERVER_FOLDER [PORT] [SUPERLINK_PORT]
#
# nginx in the foreground. It passes /v1/fleet/, where node keys are asked for, to the SuperLink on this machine and
# nothing else: whoever comes from outside can neither register a site nor start a run.
set -euo pipefail

folder=$(cd "${1:?proxy.sh SERVER_FOLDER [PORT] [SUPERLINK_PORT]}" && pwd) port=${2:-8443} superlink=${3:-8000}
mkdir -p "$folder/proxy"
cat > "$folder/proxy/nginx.conf" <<CONF
daemon off;
pid $folder/proxy/nginx.pid;
error_log stderr warn;
events { worker_connections 4096; }
http {
    access_log $folder/proxy/access.log;
    client_body_temp_path $folder/proxy/body;
    proxy_temp_path $folder/proxy/temp;
    fastcgi_temp_path $folder/proxy/temp; uwsgi_temp_path $folder/proxy/temp; scgi_temp_path $folder/proxy/temp;
    server {
        listen $port ssl;
        ssl_certificate $folder/server.crt;
        ssl_certificate_key $folder/server.key;
        ssl_protocols TLSv1.2 TLSv1.3;
        client_max_body_size 64m;   # Flower cuts what is longer into pieces of 5 MiB
        location /v1/fleet/ {
            proxy_pass https://127.0.0.1:$superlink;
            proxy_ssl_verify on;
            proxy_ssl_trusted_certificate $folder/ca.crt;
            proxy_ssl_name localhost;   # nginx compares names, not addresses
            proxy_request_buffering off;
            proxy_read_timeout 300s;
        }
        location / { return 403; }
    }
}
CONF
exec nginx -e stderr -c "$folder/proxy/nginx.conf"
