-- wrk's side of bench/gateway.py: `wrk ... -s gateway.lua URL -- EVENTS` posts EVENTS actions of the quickstart a
-- request, from requests made before the first one is sent.
local requests, turn, total = {}, 0, 0

local function event(n)
  return string.format('{"event_id":"e-%08d-%04d","request_id":"r-%08d","article":"article-%d","type":"click",' ..
    '"ts":%d}', n, n % 7919, n * 2654435761 % 100000000, n % 120, 1700000000000 + n)
end

function init(args)
  local events = tonumber(args[1])
  wrk.headers["Content-Type"] = "application/json"
  for i = 1, math.max(16, math.floor(20000 / events)) do
    local body = {}
    for k = 1, events do
      total = total + 1
      body[k] = event(total)
    end
    local text = events == 1 and body[1] or "[" .. table.concat(body, ",") .. "]"
    requests[i] = wrk.format("POST", "/v1/actions", nil, text)
  end
end

function request()
  turn = turn % #requests + 1
  return requests[turn]
end

function done(summary, latency)
  local e = summary.errors
  print(string.format('{"requests":%d,"seconds":%.3f,"not_2xx":%d,"socket_errors":%d,"p50_ms":%.2f,"p99_ms":%.2f}',
    summary.requests, summary.duration / 1e6, e.status, e.connect + e.read + e.write + e.timeout,
    latency:percentile(50) / 1e3, latency:percentile(99) / 1e3))
end
