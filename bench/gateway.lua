-- The load of bench/gateway.py, for bench/wrk.py: posts args[1] actions of the quickstart a request. All requests are
-- made before the first one is sent.
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
