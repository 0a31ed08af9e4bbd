{{- define "foremoe.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 53 | trimSuffix "-" }}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 53 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{- define "foremoe.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "foremoe.labels" -}}
{{ include "foremoe.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: foremoe
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "foremoe.serviceAccountName" -}}
{{- if .Values.serviceAccount.name -}}
{{- .Values.serviceAccount.name }}
{{- else if .Values.serviceAccount.create -}}
{{- include "foremoe.fullname" . }}
{{- else -}}
{{- fail "serviceAccount.name is needed when serviceAccount.create is false" }}
{{- end -}}
{{- end }}

{{- define "foremoe.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "foremoe.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "foremoe.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* Rights in the namespaces that are served. No secrets, no exec, no wildcards; jobs themselves are never written. */}}
{{- define "foremoe.namespacedRules" -}}
- apiGroups: [foremoe.io]
  resources: [foremoejobs]
  verbs: [get, list, watch]
- apiGroups: [foremoe.io]
  resources: [foremoejobs/status]
  verbs: [get, update]
# Needed to set blockOwnerDeletion in the owner references of children where the API server enforces it.
- apiGroups: [foremoe.io]
  resources: [foremoejobs/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end }}
