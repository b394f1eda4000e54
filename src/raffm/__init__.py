"""Train one foundation model across devices of every size, and give each device the submodel it can run."""
