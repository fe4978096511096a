"""Messages between parent and child: structs, their encoding, frames, negotiation; and events.

The parent is authoritative for which executions exist, the child for what they do. Each message
names its execution, so nothing is inferred from order across channels. Two channels connect the
sides: *control* for small messages that never wait, and *bulk* for messages that are large or many.
"""
