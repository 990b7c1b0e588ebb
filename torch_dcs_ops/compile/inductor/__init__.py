"""The only user of the compiler's private parts: those of TorchInductor, of Dynamo and of what lies between them.

`probes` lists every one of them with what has to hold of it, `support` asks it and says once what is left out.
docs/internals/inductor.md explains each, and how a version of torch is added.
"""
