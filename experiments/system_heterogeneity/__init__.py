"""RaFFM on five fleets, from Raspberry Pis to GPUs: accuracy, bytes, time and energy against full-size FedAvg."""
