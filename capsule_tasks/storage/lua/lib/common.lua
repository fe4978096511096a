local function whole(number)
  return string.format('%d', number)
end

local function clock_us()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end
