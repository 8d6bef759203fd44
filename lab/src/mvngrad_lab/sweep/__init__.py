"""Many runs on many processes and machines: a queue in a database, workers that come and go, and what they found.

The only room that imports optuna. A worker is one function, `worker.work`.
"""
