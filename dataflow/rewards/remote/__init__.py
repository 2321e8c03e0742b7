"""The reward agent spread over Ray actors."""
