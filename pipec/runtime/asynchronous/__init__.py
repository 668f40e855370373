"""Running asynchronous plans: weight versions, the rules' run-time halves, steps that overlap minibatches."""
