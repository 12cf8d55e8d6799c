"""What the policy and its frozen siblings say of a batch: log-probabilities, entropy, reference scores."""
