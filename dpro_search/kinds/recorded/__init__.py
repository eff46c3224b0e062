"""Jobs that are predicted from the recorded steps of a profile, op by op; kinds in other folders say what their plans change."""
