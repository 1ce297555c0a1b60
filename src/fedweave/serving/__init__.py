"""An OpenAI-compatible server: one thread with a running batch, or a gateway before another server.

protocol.py   requests and responses as OpenAI clients write and read them
jobs.py       one prompt to answer, and what happens to it, as both backends tell it
local.py      the backend that answers here; gateway.py the one that routes here and asks elsewhere
upstreams.py  whom a gateway asks: vLLM, SGLang, llama-server
fields.py     what a request may hold without being acted on; scores.py log-probabilities as clients read them
app.py        requests to jobs, and the routes; answers.py events to responses, whole or streamed
guard.py      API key, size of a request, shape of an error, what /metrics shows; page.html the page at /
server.py     everything together, on a port
"""
