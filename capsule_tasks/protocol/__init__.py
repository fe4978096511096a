"""What crosses a pipe between parent and child: messages, their encoding, frames, negotiation.

The parent is authoritative for which executions exist; the child for what they do. Each message
names the execution it is about, so nothing is inferred from order across channels. Two channels
connect the sides: *control*, small and never behind anything, and *bulk*, which carries whatever
can be large or many.
"""
