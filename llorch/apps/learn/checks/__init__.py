"""How lessons are judged, by kind: each puts the learner's parts in the place of ours and asks the verification."""
